"""Models of text: transformers and peft."""

import itertools
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from .base import Base

TOKENS, VOCABULARY = 12, 40


class Text(Base):
    """A model that computes its own loss. None has dropout, which differs between processes."""

    def sample(self, generator: torch.Generator) -> Any:
        ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        return {"input_ids": ids, "labels": ids}

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class GPT2(Text):
    """Its output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_positions": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **ends))


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


class Llama(Text):
    """With a plan for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        by_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        by_columns += ("mlp.gate_proj", "mlp.up_proj")
        styles = dict.fromkeys(by_columns, ColwiseParallel())
        styles |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
        layers = range(len(self.model.model.layers))
        pairs = itertools.product(layers, styles.items())
        return {f"model.model.layers.{n}.{name}": style for n, (name, style) in pairs}


class LoRA(Text):
    """peft's adapters of a Llama, whose own weights are frozen."""

    rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        names = ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(r=2, lora_alpha=4, target_modules=names, task_type="CAUSAL_LM")
        self.model = get_peft_model(llama(), config)


class T5(Text):
    """An encoder and a decoder that share their embedding."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        starts = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        self.model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **starts))


class BERT(Text):
    """A classifier of texts of several lengths, which are padded."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        more = {"intermediate_size": 48, "max_position_embeddings": TOKENS, "num_labels": 3}
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = BertConfig(vocab_size=VOCABULARY, **sizes, **more, **dropout)
        self.model = BertForSequenceClassification(config)

    def sample(self, generator: torch.Generator) -> Any:
        ids = torch.randint(1, VOCABULARY, (TOKENS,), generator=generator)
        length = torch.randint(TOKENS // 2, TOKENS, (), generator=generator)
        mask = (torch.arange(TOKENS) < length).long()
        label = int(torch.randint(3, (), generator=generator))
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": label}
