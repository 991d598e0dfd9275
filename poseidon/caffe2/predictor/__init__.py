"""Trained nets as files: predictors in a database, and the two nets of a mobile device."""
