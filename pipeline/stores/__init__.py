"""Read and write object stores and web servers that hold shards: ``s3://``, ``gs://``, ``az://`` and ``https://``.

::

    place.py       where something is: a path, or a URL without secrets
    opening.py     a place opened with the user's settings and credentials
    client.py      single requests, with obstore, and what can go wrong with them
    store.py       requests that are repeated where that helps, counted, and given up where it does not; many at a time
"""
