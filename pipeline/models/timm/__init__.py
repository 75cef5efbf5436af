"""Everything that knows timm: its classifiers as models of ours, ours as models of timm, and folders in its layout."""
