// Asks for a job's measurements as soon as the page's head is there: the server reads them while the browser still reads the
// chart library. Loaded with async, before and without everything else; job.js takes what came.

import { follow } from "./stream.js";

const address = (name) => document.querySelector(`meta[name="job-${name}"]`)?.content;

export const metricsUrl = address("metrics");

export async function fetchMetrics() {
  const answer = await fetch(metricsUrl);
  return answer.ok ? answer.json() : {};
}

const eventsUrl = address("events");

// of a job that goes on; its first event is a snapshot with the measurements
export const stream = eventsUrl ? follow(eventsUrl) : null;

// of one that has ended
export const metrics = eventsUrl ? null : fetchMetrics();
