"""miofind in PyTorch: `enable()` has its kernels run the convolutions of any model, forward and backward."""


from miofind.torch.override import Override, disable, enable, use

__all__ = ["Override", "disable", "enable", "use"]
