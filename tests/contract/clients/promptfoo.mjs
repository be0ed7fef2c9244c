// promptfoo's evaluation over the chat route, as plain data. Arguments: url, messages.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [given, answer] = process.argv.slice(2);
const { url, messages } = JSON.parse(readFileSync(given, "utf-8"));
process.env.PROMPTFOO_DISABLE_TELEMETRY = "1";
process.env.PROMPTFOO_DISABLE_UPDATE = "1";
process.env.PROMPTFOO_CONFIG_DIR = `${process.cwd()}/config`;

// The packages stand in the working folder, and not above this file.
const entry = createRequire(`${process.cwd()}/package.json`).resolve("promptfoo").replace(/cjs$/, "js");
const { default: promptfoo } = await import(pathToFileURL(entry));

const provider = (temperature) => ({
  id: "openai:chat:builtin",
  // It leaves out a temperature of 0 that is not passed through.
  config: { apiBaseUrl: `${url}/v1`, apiKey: "any", max_tokens: 200, passthrough: { temperature } },
});
const suite = (temperature) => ({
  prompts: [JSON.stringify(messages)],
  providers: [provider(temperature)],
  tests: [{ assert: [{ type: "contains", value: "chair" }] }, { assert: [{ type: "equals", value: "nothing" }] }],
  writeLatestResults: false,
  sharing: false,
});
const options = { maxConcurrency: 2, cache: false, showProgressBar: false };
const found = await (await promptfoo.evaluate(suite(0), options)).toEvaluateSummary();
const refused = await (await promptfoo.evaluate(suite(9), options)).toEvaluateSummary();
const data = {
  stats: found.stats,
  texts: found.results.map((one) => one.response.output),
  passed: found.results.map((one) => one.success),
  refused: refused.results.map((one) => one.error),
};
writeFileSync(answer, JSON.stringify(data));
process.exit(0);
