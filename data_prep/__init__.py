"""Write and verify shard sets: images in common download formats -> WebDataset tars with indexes and checksums.

======================  ===============================================================
``shard_imagenet``      command: write shards
``verify_shards``       command: verify a shard set
``upload_shards``       command: copy a shard set into a store
``stage_shards``        command: copy shards into a node's cache, with ``staging``
``make_demo_dataset``   command: write the digits data set of the demo
``sources``             the supported formats of images
``job``                 plans the writing of one split and checks the output folder
``writer``              writes a split with worker processes, then the manifest
``shard_writer``        writes one shard in a worker
``output``              a set in a folder: locks, space; files are finished, then published
``store_output``        publishes them in a store
``workers``             worker processes with a progress bar and clean shutdown
``class_names``         readable names of the classes
``set_checks``          verification of a shard set
``shard_checks``        verification of one shard
======================  ===============================================================
"""

SPLITS = ("train", "val")
STAGED = ".staged"  # folder of an output with the images of a source that cannot be read in any order
MAX_REJECTED = 0.001  # default of --max-rejected, a fraction of the images: more suggests a damaged copy
FEW_REJECTED = 5  # so many may be in a set of any size: in a small one they are no such sign
