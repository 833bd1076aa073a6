"""What every test needs: one thread per process, because many run side by side on few cores."""

import torch

torch.set_num_threads(1)
