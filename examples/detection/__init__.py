"""Object detection on the features of this project's models, with the heads of torchvision.

================== ======================================================================
``train.py``       the command: training, evaluation, resuming
``config.py``      every key, typed; ``configs/`` has the 1x schedule of the paper
``coco.py``        COCO's JSON, checked: images, boxes, masks, categories
``plan.py``        which images a step takes and what is drawn for them
``loader.py``      image files to tensors, ahead of the training
``model.py``       features, feature pyramid, torchvision's RetinaNet and Mask R-CNN
``evaluation.py``  average precision by pycocotools
``checkpoints.py`` atomic checkpoints with checksums
``log.py``         metrics.jsonl, TensorBoard, console
================== ======================================================================
"""
