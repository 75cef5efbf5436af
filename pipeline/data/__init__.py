"""Shard sets, sample order, augmentation and the data loader. Independent of models and training.

=================  ===========================================================================
``manifest``      ``manifest.json`` and the sample tables of a shard set
``shards``        a shard set: reads and verifies samples; ``mixed_set`` several of them as one
``shard_files``   reads its files from a folder, ``remote_files`` from a store
``cached_files``  the same, behind a cache of whole shards on the node; ``cache_filler`` fills it
``shard_cache``   that cache's folder: claims, room, eviction
``image_folder``  a folder of images instead of a shard set, for evaluation
``image_list``    any images that a user names, for prediction
``image_checks``  checks and re-encodes images before they are stored; ``image_headers`` parses their headers
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
