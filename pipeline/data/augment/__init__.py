"""Augmentation: decisions as NumPy arrays from uniform numbers of :mod:`pipeline.philox`, and the pixel operations.

====================  =================================================================
``crop``              random resized crop and flip, centre crop: geometry only
``interpolation``     bicubic or bilinear, for crops and RandAugment
``randaugment``       RandAugment: choice and strength of the operations
``randaugment_cpu``   RandAugment's pixels on the CPU, bit for bit Pillow's
``randaugment_dali``  RandAugment's pixels in a DALI graph
``resize_borders``    what DALI's resize lacks at an image's borders
``cubic_shift``       shears and translations on the CPU
``three_augment``     3-Augment and colour jitter: choice and strength of the operations
``gaussian_blur``     3-Augment's blur: its pixels
``erasing``           random erasing
``mixing``            Mixup and CutMix
====================  =================================================================
"""
