"""Programs that use the package: what they show is not part of it. Run from the repository's root."""
