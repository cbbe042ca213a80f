"""The convolutions of a network's step, written as a suite: of a run, of fake tensors, of exported programs."""
