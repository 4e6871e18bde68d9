"""The whole training step as one program: forward, loss, backward, clipping, optimizer."""
