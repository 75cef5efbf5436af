"""Read the files of a shard set from a folder, a store, or the cache of the node."""
