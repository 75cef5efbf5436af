"""The ranks of a job: how they meet, talk to each other and decide together.

================= ====================================================================
``world.py``      rank, world size and device of this process; joining the others
``rendezvous.py`` the process group and the key-value store behind it
``nccl.py``       NCCL reports faults to the heartbeat in place of ending the process
``signing.py``    the job's secret, and HMAC signatures made with it
``exchange.py``   all-gather of plain data as JSON
``agreement.py``  collective decisions: raise, stop or publish on all ranks alike
================= ====================================================================
"""
