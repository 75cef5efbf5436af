"""Read and verify images: shard sets on disk, in a cache or in a store, and folders of images.

================  ===========================================================================
``shard_set``     a shard set: reads and verifies samples; ``mixed_set`` joins several
``manifest``      ``manifest.json`` and the sample tables of a shard set
``image_folder``  a folder of images instead of a shard set, for evaluation
``image_checks``  checks and re-encodes images before they are stored; ``image_headers`` parses their headers
``files``         where a set's files are read from
================  ===========================================================================
"""
