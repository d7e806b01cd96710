"""Models of other packages, in tiny configurations on made-up data, as their users train them.

Nothing is downloaded. Weights and data are the same in every process, and losses are means over the
samples of a batch: so several processes compute what one computes with the same global batch.
"""

MODELS = {
    "timm ViT": "images.ViT",
    "timm ViT, sequential": "images.SequentialViT",
    "torchvision ResNet": "images.ResNet",
    "torchvision ResNet, sync_batchnorm": "images.ResNet",
    "torchvision RetinaNet": "images.RetinaNet",
    "diffusers UNet": "images.UNet",
    "GPT-2": "text.GPT2",
    "Llama": "text.Llama",
    "T5": "text.T5",
    "BERT": "text.BERT",
    "peft LoRA": "text.LoRA",
    "PyG GCN": "others.GCN",
    "WGAN-GP": "others.WGAN",
    "actor-critic": "others.ActorCritic",
}
