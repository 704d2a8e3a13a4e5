"""What a user gives by name: models, weights, calibration data, texts; and batches of any form."""
