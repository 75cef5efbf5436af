"""Let the ranks of a job meet, talk to each other and decide together; detect faults."""
