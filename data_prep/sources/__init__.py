"""Where images come from. A source lists its samples in a fixed order and reads one by number; nothing is ever unpacked."""

from data_prep.sources.base import SPLITS, Source, SourceImage
from data_prep.sources.detect import open_sources
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.subset import check_fraction, take_subset

__all__ = ["SPLITS", "ImageFolder", "Source", "SourceImage", "check_fraction", "open_sources", "take_subset"]
