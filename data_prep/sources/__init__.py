"""Read sources of images. A source lists its samples in a fixed order and reads them by number; archives are read in place.

==================  ==================================================================
``base``            what a source is, and what all of them share
``detect``          finds out which format a path has
``image_folder``    folders per class, also in a zip
``imagenet_tars``   ImageNet-1k's official tars
``devkit``          labels of ImageNet's val tar
``cifar``           CIFAR-10 and CIFAR-100 archives
``inaturalist``     iNaturalist folders with annotation files
``listing``         a CSV or JSON lines of paths and labels
``parquet``         parquet files that hold images (Hugging Face)
``webdataset_tars`` other people's WebDataset tars, local or behind URLs
``labels``          which class a label names, if any
``staged``          a copy, for sources that cannot be read in any order
``subset``          a fraction of each class; a held-out val split
==================  ==================================================================
"""

from data_prep.sources.base import Source, SourceImage
from data_prep.sources.detect import Reading, open_sources
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.subset import FIRST, RANDOM, check_fraction, hold_out, take_classes, take_subset

__all__ = [
    "FIRST",
    "RANDOM",
    "ImageFolder",
    "Reading",
    "Source",
    "SourceImage",
    "check_fraction",
    "hold_out",
    "open_sources",
    "take_classes",
    "take_subset",
]
