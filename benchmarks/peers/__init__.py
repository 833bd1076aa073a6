"""Steps of ours beside those of DDP, FSDP2, DTensor, DeepSpeed, torch.distributed.pipelining and an exported plan."""
