"""Write the sections of a page about one run; each is a function that returns its HTML, or None where there is nothing to show."""
