// Whether pages pass html-validate, and axe at two widths: node pages.mjs PAGE..., in a folder with the packages.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
const require = createRequire(`${process.cwd()}/`);
const { HtmlValidate } = require("html-validate");
const puppeteer = require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const rules = { "no-inline-style": "off", "long-title": "off", "require-sri": "off", "prefer-native-element": "off" };
const validator = new HtmlValidate({ extends: ["html-validate:recommended"], rules });
const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
let wrong = 0;
const say = (page, text) => { wrong += 1; console.log(`${page}: ${text}`); };
for (const page of process.argv.slice(2)) {
  for (const { messages } of (await validator.validateFile(page)).results)
    for (const each of messages) say(page, `line ${each.line}: ${each.ruleId}: ${each.message}`);
  for (const width of [1280, 390]) {
    const tab = await browser.newPage();
    await tab.setViewport({ width, height: 900 });
    await tab.goto(pathToFileURL(page));
    await tab.evaluate(axe);
    const { violations } = await tab.evaluate(() => axe.run());
    for (const each of violations) say(page, `${width} px: ${each.id}: ${each.help}: ${each.nodes[0].html}`);
    await tab.close();
  }
}
await browser.close();
process.exit(wrong ? 1 : 0);
