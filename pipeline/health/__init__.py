"""Examine the nodes of a job before it trains: what a rank finds (``checks``), and the verdict on all (``nodes``)."""
