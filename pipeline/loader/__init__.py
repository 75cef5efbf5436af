"""Turn samples into batches of tensors on the training device.

=================  ===========================================================================
``batches``        samples and augmentation of every batch, as a pure function of its number
``reader``         reads encoded images ahead of time; counts and replaces samples that cannot be read or decoded
``decoder``        runs DALI; ``dali_graph`` has its graphs
``cpu_transform``  resize, crop, augmentation and normalization on the CPU
``device_stream``  the loader's CUDA stream, copies to the device, the hand-over to the consumer
``loader``         puts the stages together and yields batches
``trial``          measures which of GPU and CPU should decode
=================  ===========================================================================
"""
