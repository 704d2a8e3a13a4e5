"""A user's model seen from outside: how it is called, observed, counted and narrowed."""
