"""The routes of the API, with one file for each family of routes, and the code that they share."""
