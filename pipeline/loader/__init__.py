"""Turn samples into batches of tensors on the training device."""
