"""Where images come from. A source lists its samples in a fixed order and reads one by number; nothing is ever unpacked."""

from data_prep.sources.base import Source, SourceImage
from data_prep.sources.detect import open_sources
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.subset import check_fraction, hold_out, take_subset

__all__ = ["ImageFolder", "Source", "SourceImage", "check_fraction", "hold_out", "open_sources", "take_subset"]
