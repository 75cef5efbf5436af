"""Helpers that tests of several folders share; fixtures are in ``conftest.py``.

``launching.py``              the package's commands and the repository's scripts in processes of their own
``runs.py``                   a config for a run of seconds, and what a run has logged
``ranks.py``, ``zygote.py``   jobs of several ranks, forked: each rank can be signalled and killed
``slurm_cluster.py``          a Slurm cluster on this machine
``precisions.py``             which precision a test computes in
``lion.py``                   optimizers that the package knows nothing of
``two_steps.py``              two optimizer steps of a model
``train_recipes.py``          a program that trains configs of ``configs/`` for two steps
``golden.py``                 the arrays and figures of ``tests/golden/``
``deit_weights.py``           weights under the names of DeiT's authors
``checkpoints.py``            checkpoints without a training
``images.py``                 small pictures in any file format
``official_files.py``         small look-alikes of the files that data sets are downloaded as
``sharding.py``               the sharding command and what it has written
``randaugment_reference.py``  Pillow's operations as RandAugment's reference
``pillow_recipe.py``          the whole training transform with Pillow
"""
