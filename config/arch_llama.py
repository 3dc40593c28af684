# Llama's architecture in place of GPT-2's. Put it after the config of any run:
#   python train.py config/train_gpt2.py config/arch_llama.py
#
# RMSNorm with gains, rotary positions, SwiGLU, an untied head. With n_kv_head below n_head, attention has
# grouped queries.

arch = 'llama'
bias = False  # Llama has no biases
