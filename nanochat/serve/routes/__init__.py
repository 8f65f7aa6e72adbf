"""The routes of the API, one file for each family, and what the families share."""
