"""What ``make_fixtures.py`` runs beside the authors' code, one process for each repository."""
