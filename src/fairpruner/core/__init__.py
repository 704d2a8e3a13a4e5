"""Values that pass between the stages, and the arithmetic on them: no model is needed here."""
