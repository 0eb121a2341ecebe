"""The torch.compile route: a partitioner for Inductor."""
