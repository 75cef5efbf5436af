"""Plan what a run will take, before it is submitted: memory per GPU, time per step, hours, storage. Nothing large is built."""
