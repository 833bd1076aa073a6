"""What every test needs: one thread per process, because many run side by side on few cores, and an interrupt that
arrives: whoever starts the suite in the background may have had it ignored, which programs under test would inherit."""

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
