"""Tools for those who work on the project: the house and its picture, the lock files, the log."""
