"""What a rank executes: module tree, communicator, offload, pipeline stage, compilation; and its simulation."""
