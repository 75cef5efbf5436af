"""Read and verify images: shard sets on disk, in a cache or in a store, and folders of images."""
