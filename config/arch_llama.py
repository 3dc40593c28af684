# Llama's network in place of GPT-2's. Put it behind the config of any run:
#   python train.py config/train_gpt2.py config/arch_llama.py
#
# RMSNorm with gains, rotary positions, SwiGLU, an untied head. An n_kv_head smaller than n_head makes it
# grouped-query attention.

arch = 'llama'
bias = False  # Llama has none
