"""Chat templates like those of model families, rewritten for the tests."""

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}"
    "<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Qwen 3 omits the thoughts of earlier answers, and adds thoughts to the last.
QWEN = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- set content = m.content %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{- content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Names of roles are plain text.
TINYLLAMA = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
# Rejects roles that do not alternate.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "smollm2": SMOLLM2, "tinyllama": TINYLLAMA, "mistral": MISTRAL}
ENDS = {"llama3": "<|eot_id|>", "qwen": "<|im_end|>", "smollm2": "<|im_end|>", "tinyllama": "</s>", "mistral": "</s>"}
BEGINS = {"llama3": "<|begin_of_text|>", "tinyllama": "<s>", "mistral": "<s>"}


def settings(family):
    named = {"bos_token": BEGINS.get(family), "eos_token": ENDS[family], "chat_template": TEMPLATES[family]}
    return {name: value for name, value in named.items() if value is not None}
