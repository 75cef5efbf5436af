"""Read and write object stores and web servers that hold shards and runs: ``s3://``, ``gs://``, ``az://`` and ``https://``."""
