"""Shard sets, sample order, augmentation and the data loader. Independent of models and training.

=================  ===========================================================================
``manifest``      ``manifest.json`` of a shard set
``shards``        a shard set on disk: reads and verifies samples
``shard_files``   where its files are read from
``cached_files``  the same, with a cache of whole shards on the node before it; ``cache_filler`` fills it, with ``shard_fetch``
``shard_cache``   that cache's folder: claims, room, eviction; ``cached_shard`` has its files
``sample_table``  its index, one row per sample
``image_folder``  a folder of images in place of a shard set, for evaluation
``image_list``    any images that a user names, for prediction; ``image_names`` finds them
``checked_images``  what both have in common
``image_checks``  checks and re-encodes images before they are stored
``jpeg``          parses and checks JPEG headers
``kept_formats``  the PNG, WebP, TIFF and BMP images that shards hold as they are
``order``         the permutation of an epoch, and the places of an image's views in a global batch
``samples``       what batches know of a split, and the order of several sets
``batches``       samples and augmentation of every batch, as a pure function
``reader``        reads encoded images ahead of time; counts and replaces samples that cannot be read or decoded
``decoder``       runs DALI
``dali_graph``    the DALI graphs
``cpu_transform``  resize, crop, augmentation and normalization on the CPU
``device_stream``  the loader's CUDA stream, copies to the device, the hand-over to the consumer
``loader``        puts the stages together and yields batches of tensors
``decoding_trial``  measures which of GPU and CPU should decode
``augment``       the augmentations
=================  ===========================================================================
"""
