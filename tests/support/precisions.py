"""Which precision a test computes in. Said here alone, because a CPU without bf16 instructions is 10 to 100 times slower in bf16.

``FP32``    everything that is not about precision: each CPU does it at full speed
``RECIPE``  the whole system as a recipe runs it: bf16 where the CPU has instructions for it, fp32 elsewhere
``BF16``    what is about bf16 itself, also where that is emulated: at most ``BF16_STEPS`` steps of ``BF16_BATCH`` images of 32 pixels
"""

FP32, RECIPE, BF16 = "fp32", "auto", "bf16"
BF16_STEPS, BF16_BATCH = 2, 4
EMULATED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # makes a CPU one without bf16 instructions
