"""Read the files of a shard set.

================  ===========================================================================
``local``         from a folder; ``remote`` from a store
``cached``        the same, behind a cache of whole shards on the node; ``cache_filler`` fills it
``cache``         that cache's folder: claims, room, eviction
================  ===========================================================================
"""
