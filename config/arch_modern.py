# A network of 2025 in place of GPT-2's; it goes behind any run's config: python train.py config/train_gpt2.py config/arch_modern.py
# RMSNorm without gains, rotary positions, normalised queries and keys, squared ReLU, untied head, bounded logits: nanochat's, as
# transformers has it in NanoChatForCausalLM.

arch = 'modern'
bias = False  # it has none
