"""Check that a run is what it says: its records against each other, and steps of it trained again."""
