"""A declarative graph-rewrite backend for torch.compile."""
