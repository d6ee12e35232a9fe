"""A PyTorch step of one linear layer."""

import torch


def program():
    return {
        "module": torch.nn.Linear(64, 64),
        "inputs": (torch.ones(64, 64),),
        "optimizer": torch.optim.AdamW,
    }
