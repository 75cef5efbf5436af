"""Object detection on this project's models, with the heads of torchvision: README.md has the order of reading."""
