"""Score: one pass over calibration data gives a removal and a protection number for every unit."""
