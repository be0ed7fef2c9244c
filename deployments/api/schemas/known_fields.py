"""Lists the request fields of OpenAI, vLLM, SGLang, llama.cpp, TGI and the rerank services, and what becomes of each.

A route honours the fields that its schema declares. This table decides about the others, on every route alike:

- HARMLESS fields change no answer. They are accepted and ignored.
- REFUSED fields change the answer where they are honoured. Elsewhere they are refused, unless they are null or have a
  value without an effect.

A name in neither list is unknown: the answer names it in a header, or the request is refused if it is strict. Every
field that a route declares is in the table too, so that a route without it does not ignore it.

Sources: the request models of vLLM (`entrypoints/openai`, `entrypoints/pooling`) and SGLang
(`entrypoints/openai/protocol.py`, `sampling_params`), llama.cpp's server documentation, TGI's `GenerateParameters`, the
types of the openai package, and the API references of Cohere, Jina, Voyage, Mixedbread, Pinecone and Isaacus.
"""

from collections.abc import Mapping
from typing import Any

Neutral = tuple[Any, ...]

HARMLESS: frozenset[str] = frozenset((
    # About the request, its user or its place in a cache or a queue.
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "prediction", "request_id", "rid", "session_id", "custom_labels",
    "priority", "cache_prompt", "id_slot", "n_keep", "n_discard", "log_metrics", "routed_dp_rank",
    "disagg_prefill_dp_rank", "data_parallel_rank", "additional_data",
    # Only the pieces of a stream, or the speed of tokens.
    "stream_interval", "stream_reasoning", "ngram_corpus_id", "speculative.n_max", "speculative.n_min",
    "speculative.p_min",
    # Only for requests with tools, images, experts or reasoning parsers, whose own fields are refused.
    "parallel_tool_calls", "separate_reasoning", "media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs",
    "images_config", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "routed_experts_prompt_start",
    "routed_experts_start_len",
    # Nothing is drawn where a route does not declare it, and fast tokenizers have no such spaces.
    "seed", "spaces_between_special_tokens",
))  # fmt: skip

_OFF: Neutral = (False,)
_ZERO: Neutral = (0,)
_ONE: Neutral = (1,)

REFUSED: Mapping[str, Neutral] = {
    # The input.
    "prompt": (), "messages": (), "input": (), "inputs": (), "text": (), "input_ids": (), "input_embeds": (),
    "prompt_embeds": (), "prompt_token_ids": (), "tokens": (), "query": (), "queries": (), "items": (), "documents": (),
    "texts": (), "text_1": (), "text_2": (), "data_1": (), "data_2": (), "questions": (), "question": (), "options": (),
    "instructions": (), "instances": (), "parameters": ({},), "sampling_params": ({},), "image_data": ([],),
    "audio_data": ([],), "video_data": ([],), "previous_response_id": (), "conversation": (), "context_management": (),
    "background": _OFF, "include": ([],), "suffix": ("",), "prefix": ("",),
    # How the input becomes a prompt.
    "add_special_tokens": (), "truncate": (), "truncation": ("disabled",), "truncate_prompt_tokens": (),
    "truncation_side": (), "truncation_direction": (), "padding": ("do_not_pad",), "template": (), "instruction": (),
    "instruct": (), "system": (), "chat_template": (), "chat_template_kwargs": ({},), "add_generation_prompt": (),
    "continue_final_message": _OFF, "item_first": _OFF, "seam": (), "max_item_tokens": (), "max_query_tokens": (),
    "max_tokens_per_doc": (), "max_tokens_per_query": (), "max_chunks_per_doc": _ONE, "overlap_tokens": (),
    "late_chunking": _OFF, "chunking_options": (), "is_iql": _OFF, "rank_fields": (), "step_tag_id": (),
    "returned_token_ids": (), "embed_override_token_id": (), "query_embed_overrides": (), "item_embed_overrides": (),
    "rewrite_query": _OFF, "cache_salt": (), "extra_key": (),
    # How much is generated, and when it stops.
    "max_tokens": _ZERO, "max_completion_tokens": _ZERO, "max_output_tokens": (), "max_new_tokens": (),
    "n_predict": (-1,), "min_tokens": _ZERO, "min_new_tokens": _ZERO, "n": _ONE, "n_cmpl": _ONE, "best_of": _ONE,
    "num_return_sequences": _ONE, "stop": ([], ""), "stop_sequences": ([],), "stop_token_ids": ([],),
    "stop_regex": ([], ""), "no_stop_trim": _OFF, "include_stop_str_in_output": _OFF, "ignore_eos": _OFF,
    "early_stopping": _OFF, "t_max_predict_ms": _ZERO, "n_indent": _ZERO, "repetition_detection": (),
    "max_tool_calls": (), "resume_token_ids": (), "session_params": (),
    # How tokens are drawn.
    "temperature": _ONE, "temp": _ONE, "top_k": (0, -1), "top_p": _ONE, "min_p": _ZERO, "top_a": _ZERO,
    "top_n_sigma": (-1,), "typical_p": _ONE, "typical": _ONE, "tfs_z": _ONE, "tfs": _ONE, "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO, "min_keep": _ZERO, "do_sample": (), "samplers": (), "sampler_order": (), "sampling_seed": (),
    "dynatemp_range": _ZERO, "dynatemp_exponent": _ONE, "smoothing_factor": _ZERO, "smoothing_curve": _ONE,
    "mirostat": _ZERO, "mirostat_mode": _ZERO, "mirostat_tau": (5,), "mirostat_eta": (0.1,), "xtc_probability": _ZERO,
    "xtc_threshold": (0.1,), "dry_multiplier": _ZERO, "dry_base": (1.75,), "dry_allowed_length": (2,),
    "dry_penalty_last_n": (-1,), "dry_sequence_breakers": (["\n", ":", '"', "*"],), "adaptive_target": (-1,),
    "adaptive_decay": (), "presence_penalty": _ZERO, "frequency_penalty": _ZERO, "repetition_penalty": _ONE,
    "repeat_penalty": _ONE, "repeat_last_n": (64,), "no_repeat_ngram_size": _ZERO, "penalty_alpha": _ZERO,
    "guidance_scale": _ONE, "cfg_scale": _ONE, "negative_prompt": ("",), "logit_bias": ({}, []),
    "allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],), "custom_logit_processor": (),
    "custom_params": ({},), "use_beam_search": _OFF, "num_beams": _ONE, "length_penalty": _ONE, "watermark": _OFF,
    "watermarking": _OFF, "lora": ([],), "lora_path": (), "lora_request": (), "adapter_id": (), "vllm_xargs": ({},),
    "kv_transfer_params": (), "ec_transfer_params": (), "bootstrap_host": (), "bootstrap_port": (),
    "bootstrap_room": (),
    # Constraints on the text.
    "response_format": ({"type": "text"},), "structured_outputs": (), "structural_tag": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (),
    "guided_whitespace_pattern": (), "regex": (), "ebnf": (), "json_schema": (), "grammar": ("",),
    "grammar_lazy": _OFF, "grammar_triggers": ([],), "preserved_tokens": ([],), "tools": ([],),
    "tool_choice": ("none",), "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "verbosity": ("medium",), "moderation": (),
    # Reasoning.
    "reasoning": (), "reasoning_effort": (), "reasoning_format": ("none",), "reasoning_budget": (-1,),
    "include_reasoning": (True,), "enable_thinking": (), "thinking": (), "thinking_budget": (),
    "thinking_token_budget": (-1,), "thinking_forced_open": _OFF, "task": (),
    # The labels or heads, and how their numbers become the answer's.
    "label_token_ids": (), "labels": (), "continuations": (), "normalization": ("none",), "apply_softmax": (),
    "use_activation": (), "activation": (), "softmax": (), "raw_scores": _OFF, "normalize": (), "aggregate": (),
    "prompt_name": (), "steps": _OFF, "scoring_method": ("auto",),
    "dimensions": (), "encoding_format": ("float",), "embed_dtype": (),
    "endianness": (), "embedding_types": (), "embedding_type": ("float",), "encoding_type": ("float",),
    "normalized": (True,), "input_type": (), "top_n": _ZERO, "on_item_error": (),
    # Further parts of the answer.
    "stream": _OFF, "stream_options": (), "echo": _OFF, "logprobs": (False, 0), "top_logprobs": _ZERO,
    "logprob_token_ids": (), "prompt_logprobs": (), "top_n_tokens": _ZERO, "n_probs": _ZERO, "return_logprob": _OFF,
    "logprob_start_len": (-1,), "top_logprobs_num": _ZERO, "token_ids_logprob": (), "return_text_in_logprobs": _OFF,
    "post_sampling_probs": _OFF, "decoder_input_details": _OFF, "details": _OFF, "return_full_text": _OFF,
    "return_token_ids": _OFF, "return_tokens_as_token_ids": _OFF, "return_tokens": _OFF, "return_token_strs": _OFF,
    "return_token_offsets": _OFF, "return_prompt_text": _OFF, "return_hidden_states": _OFF,
    "return_pooled_hidden_states": _OFF, "return_routed_experts": _OFF, "return_cached_tokens_details": _OFF,
    "return_progress": _OFF, "return_documents": _OFF, "return_input": _OFF, "return_text": _OFF,
    "return_embeddings": _OFF, "relevant_spans": (False, []), "timings_per_token": _OFF, "response_fields": ([],),
    "skip_special_tokens": (), "detokenize": (True,), "detail": (), "layout": (),
}  # fmt: skip

MESSAGE_REFUSED: Mapping[str, Neutral] = {
    "tool_calls": ([],), "function_call": (), "refusal": (), "audio": (), "reasoning": ("",),
    "reasoning_content": ("",), "prefix": _OFF, "partial": _OFF,
}  # fmt: skip
"""Fields of a message, decided about in the same way."""


def is_neutral(value: object, neutral: Neutral) -> bool:
    """Tells whether a field's value has no effect: null, or equal to one of `neutral`. True and 1 differ."""
    return value is None or any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)
