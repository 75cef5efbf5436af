"""Read and write object stores and web servers that hold shards: ``s3://``, ``gs://``, ``az://`` and ``https://``."""
